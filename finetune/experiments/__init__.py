"""Many runs of one recipe: comparison, ablation and sweep, built on a shared runner."""
