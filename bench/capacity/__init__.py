"""How large a fleet a workload takes: formulas, a simulation that checks them, and measurements."""
