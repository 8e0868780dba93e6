INSERT INTO billing_rollupstate (id, settled_before, totals_before, coarse_before, end_users_before)
VALUES (1, now(), now(), now(), now())
