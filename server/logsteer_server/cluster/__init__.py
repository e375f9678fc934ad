"""The service on several machines: Ray Serve places whole servers, an ingress forwards to them."""
