"""Ranks that decide alike: what they compare when they compile (:mod:`f8fx.ranks.agreement`, over the store of
:mod:`f8fx.ranks.ledger`), and what they only tell each other (:mod:`f8fx.ranks.peers`)."""
