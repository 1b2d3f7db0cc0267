"""Runs a command over a grid of settings and seeds, and finds out where between the extremes the best setting lies."""
