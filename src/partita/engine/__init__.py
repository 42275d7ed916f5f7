"""HOW FAST: minibatches, energies of many chains at once, one step."""
