-- Returns the history of the database's transactions: the system identifier and the timeline, which changes when a
-- standby is promoted. Transaction numbers and sequences may then have gone back. The timeline is that of the next
-- record in the log: the control file has the new one only after the first checkpoint. Every role may call these
-- functions, unless their rights were revoked; the identifier can be missing. A standby has no next record, which is an
-- error. A service without a log of its own returns 'unknown' at all times.
CREATE FUNCTION tenants_timeline() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    timeline text;
BEGIN
    BEGIN
        timeline := substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
    EXCEPTION WHEN feature_not_supported OR insufficient_privilege OR undefined_function THEN
        RETURN 'unknown';
    END;
    RETURN (SELECT c.system_identifier FROM pg_control_system() c) || ':' || timeline;
EXCEPTION WHEN insufficient_privilege THEN
    RETURN ':' || timeline;
END
$$;
