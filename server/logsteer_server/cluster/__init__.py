"""The service as a Ray Serve application: one deployment a model, one for HTTP in front of them.

    deployment `ingress`            the application of `app.py`; a queue for each model
    deployment `model-ID`           replicas, each an actor with a `LocalEngine` of its own

Whoever imports this package needs the extra `ray`.
"""
