"""The experiments of FairServe."""
