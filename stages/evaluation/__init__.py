"""How good a policy is: numbers of its answers, and a program of the user's."""
