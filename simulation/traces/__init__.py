"""Recorded traffic as arrivals: fairgate's own access log, public traces, and CSV files of one's own."""
