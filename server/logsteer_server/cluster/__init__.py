"""The service as applications of Ray Serve: one of its own, and one for each model.

    `logsteer`             deployment `ingress`       the application of `app.py`; queues of models
                           deployment `coordinator`   says which models there are, deploys them
                           deployment `ledger`        what ingresses share: limits, answers, loads
    `logsteer-ID-DIGEST`   deployment `model-ID`      actors, each with a `LocalEngine` of its own

Whoever imports this package needs the extra `ray`.
"""
