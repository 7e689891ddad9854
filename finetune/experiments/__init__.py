"""Many runs of one recipe: comparison, ablation and sweep on a shared runner."""
