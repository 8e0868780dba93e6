-- Creates the periods that start at these instants. The unused amount of the period before rolls over, up to the
-- budget's limit; reserved amounts count as used. A budget with rollover gets a row for every period since the last one,
-- because a period without requests leaves its whole amount. What rolls over is subtracted from the period before, on
-- which late usage may still draw.
CREATE FUNCTION billing_create_budget_periods(budgets bigint[], begun timestamptz[], zone text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    b record;
    last billing_budgetperiod;
    start timestamptz;
    step interval;
    carry bigint;
BEGIN
    PERFORM 1 FROM billing_budgetperiod p WHERE p.id IN (
        SELECT DISTINCT ON (o.budget_id) o.id FROM unnest(budgets, begun) AS n (id, starts)
        JOIN billing_budgetperiod o ON o.budget_id = n.id AND o.period_start < n.starts
        ORDER BY o.budget_id, o.period_start DESC
    ) ORDER BY p.id FOR NO KEY UPDATE;
    FOR b IN
        SELECT c.*, n.starts, CASE WHEN c.rollover_limit = 0 OR c.period = 'lifetime' THEN n.starts ELSE coalesce(
            (SELECT max(o.period_start) FROM billing_budgetperiod o
                WHERE o.budget_id = c.id AND o.period_start < n.starts),
            least(n.starts, date_trunc(c.period::text, c.created_at AT TIME ZONE zone) AT TIME ZONE zone)) END AS since
        FROM unnest(budgets, begun) AS n (id, starts) JOIN billing_budget c ON c.id = n.id ORDER BY c.id
    LOOP
        step := CASE b.period WHEN 'month' THEN interval '1 month' ELSE interval '1 day' END;
        FOR start IN
            SELECT s AT TIME ZONE zone
            FROM generate_series(b.since AT TIME ZONE zone, b.starts AT TIME ZONE zone, step) AS s
        LOOP
            carry := 0;
            SELECT * INTO last FROM billing_budgetperiod o WHERE o.budget_id = b.id AND o.period_end = start
                AND b.rollover_limit > 0 FOR NO KEY UPDATE;
            IF FOUND THEN
                carry := greatest(0, least(b.rollover_limit,
                    b.amount + last.rolled_over - ceil(last.used / 1000000)::bigint - last.reserved));
            END IF;
            INSERT INTO billing_budgetperiod
                (tenant_id, budget_id, unit, period_start, period_end, rolled_over, used, reserved, rejected)
            VALUES (b.tenant_id, b.id, b.unit, start,
                CASE WHEN b.period <> 'lifetime' THEN (start AT TIME ZONE zone + step) AT TIME ZONE zone END,
                carry, 0, 0, 0)
            ON CONFLICT (budget_id, period_start) DO NOTHING;
            IF FOUND AND carry > 0 THEN
                UPDATE billing_budgetperiod p SET rolled_over = p.rolled_over - carry WHERE p.id = last.id;
            END IF;
        END LOOP;
    END LOOP;
END
$$;
