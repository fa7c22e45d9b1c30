"""Processes, cgroups, sandbox, exec. `*_main.py` files run standalone (`python -I -S`)."""
