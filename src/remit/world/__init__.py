"""Interfaces to the operating system and their production implementations. No decisions."""
