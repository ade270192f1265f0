"""Pieces of a model that some peers serve and others train through: servers, clients, gates and mixtures."""
