"""Jobs, plans and the engine protocol: what the HTTP process and engines agree on."""
