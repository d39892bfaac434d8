"""The production admission engine against engine models, in virtual time."""
