"""What a run measures of itself: metrics, device use, steps that diverge, the verdict."""
