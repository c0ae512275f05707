"""How good a policy is: numbers of its answers, and of a program of the user's."""
