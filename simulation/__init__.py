"""What would this traffic have seen? The production admission engine against engine models, in virtual time."""
