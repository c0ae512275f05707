"""What an update writes for the next one: a policy that anyone can load, and a state that any ranks can."""
