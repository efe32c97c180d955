"""LEML and CPLST: low-rank learning."""
