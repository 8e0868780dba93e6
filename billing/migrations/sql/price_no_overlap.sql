-- A text as a range of one value, because exclusion constraints compare texts only with an extension. tenant_id, tier
-- and component have no slash, so two keys never have the same text.
ALTER TABLE billing_price ADD CONSTRAINT price_no_overlap EXCLUDE USING gist (
    billing_textrange(
        book_id::text || '/' || coalesce(tenant_id::text, '') || '/' || tier || '/' || component || '/' || model,
        book_id::text || '/' || coalesce(tenant_id::text, '') || '/' || tier || '/' || component || '/' || model, '[]'
    ) WITH &&,
    int4range(from_tokens, until_tokens) WITH &&,
    int4range(from_minute, until_minute) WITH &&,
    int4range(from_weekday, until_weekday) WITH &&,
    tstzrange(effective_from, effective_until) WITH &&
);
