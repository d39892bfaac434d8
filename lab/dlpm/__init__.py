"""The experiments of DLPM and D2LPM."""
