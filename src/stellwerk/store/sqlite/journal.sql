-- Journal and logs: what is appended, read in order, and forgotten.

-- name: insert_journal
-- The events of one call.
INSERT INTO journal (last_id, count, position, body) VALUES (?, ?, ?, ?)

-- name: journal_position
-- How many events were ever written up to the end of the first call with events after an EventId.
SELECT position FROM journal WHERE last_id > ? ORDER BY last_id LIMIT 1

-- name: journal_after
-- Calls with events after an EventId, up to a position, as one row: sizes, and one text of hex digits.
SELECT json_group_array(json_array(last_id, count, length(body))), group_concat(hex(body), '') FROM (
    SELECT last_id, count, body FROM journal
    WHERE last_id > :after AND position - count < :until ORDER BY last_id LIMIT :rows)

-- name: journal_after_of
-- The same for a reader who wants one run only: bodies that do not contain its id are left empty.
SELECT json_group_array(json_array(last_id, count, length(body))), group_concat(hex(body), '') FROM (
    SELECT last_id, count, iif(instr(body, :run), body, x'') AS body FROM journal
    WHERE last_id > :after AND position - count < :until ORDER BY last_id LIMIT :rows)

-- name: journal_ends
-- The last call, and how many events are kept.
SELECT last_id, position, position - (SELECT position - count FROM journal ORDER BY last_id LIMIT 1)
FROM journal ORDER BY last_id DESC LIMIT 1

-- name: journal_oldest
-- The oldest calls, without the last one: [last_id, count].
SELECT json_group_array(json_array(last_id, count)) FROM (
    SELECT last_id, count FROM journal WHERE last_id < (SELECT max(last_id) FROM journal) ORDER BY last_id LIMIT ?)

-- name: trim_journal
-- Forget calls up to an EventId.
DELETE FROM journal WHERE last_id <= ?

-- name: put_meta
-- Remember a word under a name.
INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)

-- name: get_meta
-- What was remembered.
SELECT value FROM meta WHERE key = ?

-- name: log_heads
-- The runs of chunks, if running, with the number of their last line: [id, added, attempt, last line].
SELECT json_group_array(json_array(r.id, r.added, r.attempt,
    coalesce((SELECT max(l.last_line) FROM logs AS l WHERE l.run = r.added), 0)))
FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.value WHERE r.state = 'running'

-- name: logs_taken
-- Which chunks [[run, attempt, sequence], …] are already there.
SELECT json_group_array(json_array(l.run, l.attempt, l.sequence, l.last_line))
FROM json_each(?) AS j CROSS JOIN logs AS l
    ON l.run = j.value ->> 0 AND l.attempt = j.value ->> 1 AND l.sequence = j.value ->> 2

-- name: insert_logs
-- New chunks.
INSERT INTO logs (run, last_line, attempt, sequence, count, body) VALUES :rows(6)

-- name: log_end
-- The key of a run and the number of its last line.
SELECT added, coalesce((SELECT max(last_line) FROM logs WHERE run = added), 0) FROM runs WHERE id = ?

-- name: read_logs
-- Chunks that contain a line after this one.
SELECT last_line, attempt, count, body FROM logs WHERE run = ? AND last_line > ? ORDER BY last_line LIMIT ?
