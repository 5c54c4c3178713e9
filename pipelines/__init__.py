"""What a user runs: the command line, its configuration, and the compositions of the stages. Holds no algorithm."""
