"""Ablations: variants of a drafter trained side by side from one store, compared in one table and one report."""
