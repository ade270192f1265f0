"""How long an iteration takes by formulas: fitted to what was measured, held against published figures."""
