"""The controllers of a scope, one module each."""
