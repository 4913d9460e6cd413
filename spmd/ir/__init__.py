"""The program that every stage reads: frozen values, ops and regions."""
