"""How ranks talk: one protocol over torch, a store or nothing; one rule for errors; one time limit."""
