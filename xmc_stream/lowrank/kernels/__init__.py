"""Compiled loops of LEML and CPLST: conjugate gradients, pairs of factors."""
