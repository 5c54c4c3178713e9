"""`dflash doctor`: what this machine has for both stages, what is missing, what that costs, and what to install."""
