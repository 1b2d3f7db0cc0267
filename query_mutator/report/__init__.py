"""Pictures and tables of runs; nothing here loads torch."""
