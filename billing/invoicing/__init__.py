"""How an invoice is made: its lines, its totals, and the forms it is given out in."""
