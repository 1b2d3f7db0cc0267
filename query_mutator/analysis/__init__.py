"""Reads what trainers logged, compares runs by step and by time, and says how sure the answer is; never loads torch."""
