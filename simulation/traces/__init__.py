"""Recorded traffic as arrivals: fairgate's access log, public traces, and CSV files."""
