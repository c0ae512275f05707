"""The process that computes, whatever its task."""
