-- Returns the history of the database's transactions: the system identifier and the timeline, which changes when a
-- standby is promoted. Transaction numbers and sequences may then have gone back. The timeline is that of the next
-- record in the log: the control file has the new one only after the first checkpoint. Every role may call these
-- functions. A standby has no such record, which is an error, so nobody takes it for the database. A service without a
-- log of its own returns 'unknown' at all times.
CREATE FUNCTION tenants_timeline() RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT system_identifier FROM pg_control_system()) || ':'
        || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8);
EXCEPTION WHEN feature_not_supported OR insufficient_privilege OR undefined_function THEN
    RETURN 'unknown';
END
$$;
