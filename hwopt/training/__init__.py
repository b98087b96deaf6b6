"""The run: built from a plan, trained step by step, evaluated, reported."""
