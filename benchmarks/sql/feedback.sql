INSERT INTO feedback_submittedfeedback (tenant_id, request_id, key_id, success)
SELECT tenant_id, request_id, key_id, total_ms % 5 > 0 FROM request_log_requestrecord
WHERE outcome = 'completed' AND total_ms % 100 = 1
