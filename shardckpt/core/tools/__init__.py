"""Functions on full parameters and gradients: summon, clip, scale."""
