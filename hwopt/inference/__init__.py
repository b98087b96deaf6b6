"""Use a trained model: predict and evaluate the rows of a file."""
