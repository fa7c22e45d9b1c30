"""Commands that run or inspect something on this machine."""
