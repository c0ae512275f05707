"""What runs in an interpreter of an environment's own, whose packages may clash with those of this one."""
