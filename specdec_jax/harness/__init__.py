"""Measures acceptance, cost and walltime, and puts the paper's tables and figures beside what was measured."""
