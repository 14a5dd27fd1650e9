"""Intake: records in, verdicts out."""
