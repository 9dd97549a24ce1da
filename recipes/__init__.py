"""The recipes that ship with qtool."""
