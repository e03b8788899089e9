-- Statements of the hot path answer one row, however many runs they tell of: each row that Python fetches hands
-- over the GIL. JSON arrays in text form carry the rest, and msgspec reads them straight into structs.

-- name: run_item
-- One run as a JSON array, in the order of rows.RunItem; the spec is pasted in as it was stored.
'[' || spec || ',' || coalesce(result, 'null')
    || iif(has_children, ',true', ',false') || iif(stop_asked, ',true,', ',false,')
    || substr(json_array(id, version, state, priority, attempt, tries, crashes, due_ms, alarm_ms, live_key, worker,
        started_ms, ended_ms, reason, error, exit_code, waits_for, parked, added, changed), 2)

-- name: list
-- Items as one JSON list.
'[' || coalesce(group_concat(item), '') || ']'

-- == writing ========================================================================================================

-- name: insert_runs
-- New runs that have not ended. OR IGNORE: the count tells that an id or a live key was taken.
INSERT OR IGNORE INTO runs (added, id, version, state, queue, scope, name, priority, created_ms, attempt, due_ms,
    alarm_ms, live_key, worker, started_ms, waits_for, has_children, parked, changed, spec)
VALUES :rows(20)

-- name: insert_runs_whole
-- New runs of which any column may be set.
INSERT OR IGNORE INTO runs (added, id, version, state, queue, scope, name, priority, created_ms, attempt, due_ms,
    alarm_ms, live_key, worker, started_ms, waits_for, has_children, parked, changed, spec,
    tries, crashes, ended_ms, reason, error, exit_code, stop_asked, result)
VALUES :rows(28)

-- name: insert_labels
-- What the runs can be found by.
INSERT OR IGNORE INTO labels (key, value, run) VALUES :rows(3)

-- name: rows_before
-- What the runs are now that shall be changed, counted; {id: added} makes sure that both mean the same row.
SELECT json_group_array(json_array(queue, state, free, n)) FROM (
    SELECT r.queue, r.state, r.parked IS NULL AS free, count(*) AS n
    FROM json_each(?) AS j CROSS JOIN runs AS r ON r.added = j.value
    WHERE r.id = j.key
    GROUP BY r.queue, r.state, free)

-- name: rows_before_by_id
-- The same for runs that go.
SELECT json_group_array(json_array(queue, state, free, n)) FROM (
    SELECT r.queue, r.state, r.parked IS NULL AS free, count(*) AS n
    FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.value
    GROUP BY r.queue, r.state, free)

-- name: newly_claimable
-- Queues in which these runs, which shall be ready, were not claimable.
SELECT json_group_array(DISTINCT r.queue)
FROM json_each(?) AS j CROSS JOIN runs AS r ON r.added = j.value
WHERE NOT (r.state = 'ready' AND r.parked IS NULL) AND r.queue <> '-'

-- name: running_specs
-- The specs of those of these runs that are running.
SELECT '[' || coalesce(group_concat(r.spec), '') || ']'
FROM json_each(?) AS j CROSS JOIN runs AS r ON r.added = j.value
WHERE r.state = 'running'

-- name: update_runs
-- Rows that get the same new head.
UPDATE runs SET version = ?, state = ?, priority = ?, attempt = ?, tries = ?, crashes = ?, due_ms = ?, alarm_ms = ?,
    live_key = ?, worker = ?, started_ms = ?, ended_ms = ?, reason = ?, error = ?, exit_code = ?, waits_for = ?,
    has_children = ?, stop_asked = ?, parked = ?, result = NULL, changed = ?
WHERE added IN (SELECT value FROM json_each(?)) AND version = ?

-- name: update_runs_results
-- Rows that get the same new head, but each its own result: {added: result}.
UPDATE runs SET version = ?, state = ?, priority = ?, attempt = ?, tries = ?, crashes = ?, due_ms = ?, alarm_ms = ?,
    live_key = ?, worker = ?, started_ms = ?, ended_ms = ?, reason = ?, error = ?, exit_code = ?, waits_for = ?,
    has_children = ?, stop_asked = ?, parked = ?, changed = ?, result = j.value
FROM json_each(?) AS j
WHERE runs.added = CAST(j.key AS INTEGER) AND runs.version = ?

-- name: update_runs_each
-- Rows of which each gets its own new head.
UPDATE runs SET version = j.column1, state = j.column2, priority = j.column3, attempt = j.column4, tries = j.column5,
    crashes = j.column6, due_ms = j.column7, alarm_ms = j.column8, live_key = j.column9, worker = j.column10,
    started_ms = j.column11, ended_ms = j.column12, reason = j.column13, error = j.column14, exit_code = j.column15,
    waits_for = j.column16, has_children = j.column17, stop_asked = j.column18, parked = j.column19,
    result = j.column20, changed = j.column21
FROM (VALUES :rows(23)) AS j
WHERE runs.added = j.column22 AND runs.version = j.column23

-- name: touch_runs
-- The last EventId of the call, where it was not known when the rows were written.
UPDATE runs SET changed = ? WHERE added IN (SELECT value FROM json_each(?))

-- name: drop_runs
-- Runs whose time of keeping is over: {id: version}.
DELETE FROM runs WHERE added IN (
    SELECT r.added FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.key WHERE r.version = j.value)

-- name: drop_logs
-- The logs of runs that go; before the runs themselves.
DELETE FROM logs WHERE run IN (SELECT r.added FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.value)

-- name: drop_labels
-- The labels of runs that go; before the runs themselves.
DELETE FROM labels WHERE run IN (SELECT r.added FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.value)

-- name: drop_bodies
-- The bodies of runs that go.
DELETE FROM bodies WHERE run IN (SELECT value FROM json_each(?))

-- name: drop_edges_down
-- The edges from runs that go to their children.
DELETE FROM edges WHERE parent IN (SELECT value FROM json_each(?))

-- name: drop_edges_up
-- The edges from runs that go to their parents.
DELETE FROM edges WHERE child IN (SELECT value FROM json_each(?))

-- name: put_bodies
-- Inputs and results.
INSERT OR REPLACE INTO bodies (run, key, data) VALUES :rows(3)

-- name: put_edges
-- Children wait for parents.
INSERT OR REPLACE INTO edges (parent, child, "when") VALUES :rows(3)

-- name: put_records
-- New records, and known ones as they shall be; `added` stays that of the first.
INSERT INTO records (kind, key, version, tag, alarm_ms, added, body) VALUES :rows(7)
ON CONFLICT (kind, key) DO UPDATE SET version = excluded.version, tag = excluded.tag, alarm_ms = excluded.alarm_ms,
    body = excluded.body

-- name: drop_records
-- Records that go: [[kind, key], …].
DELETE FROM records WHERE (kind, key) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))

-- name: put_gates
-- Gates as they shall be.
INSERT OR REPLACE INTO gates (key, kind, until_ms, body) VALUES :rows(4)

-- name: drop_gates
-- Gates that go: [[key, kind], …].
DELETE FROM gates WHERE (key, kind) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))

-- name: add_counts
-- [[queue, state, difference], …]
INSERT INTO counters (queue, state, n)
SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(?) WHERE true
ON CONFLICT (queue, state) DO UPDATE SET n = n + excluded.n

-- == comparing ======================================================================================================

-- name: run_versions
-- What is known of these runs, for the comparison and for what follows from it.
SELECT json_group_array(json_array(r.id, r.added, r.version, r.state, r.queue, r.parked, r.alarm_ms, r.live_key))
FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.value

-- name: live_holders
-- Who holds these live keys.
SELECT json_group_array(json_array(r.live_key, r.id))
FROM json_each(?) AS j CROSS JOIN runs AS r ON r.live_key = j.value
WHERE r.live_key IS NOT NULL

-- name: record_versions
-- The versions of these records: [[kind, key], …].
SELECT json_group_array(json_array(r.kind, r.key, r.version))
FROM json_each(?) AS j CROSS JOIN records AS r ON r.kind = j.value ->> 0 AND r.key = j.value ->> 1

-- == claiming =======================================================================================================

-- name: candidates
-- The best claimable runs of a queue, as one row.
SELECT :include(list) FROM (
    SELECT :include(run_item) AS item FROM runs
    WHERE queue = ? AND state = 'ready' AND parked IS NULL
    ORDER BY priority DESC, created_ms, id LIMIT ? OFFSET ?)

-- name: candidates_only
-- Those of the named runs that are claimable in a queue. The plus keeps it from walking the whole queue.
SELECT :include(list) FROM (
    SELECT :include(run_item) AS item FROM runs
    WHERE id IN (SELECT value FROM json_each(?)) AND +queue = ? AND state = 'ready' AND parked IS NULL
    ORDER BY priority DESC, created_ms, id LIMIT -1)

-- name: park
-- Held runs are put aside, out of the way of claims.
UPDATE runs SET parked = ? WHERE added IN (SELECT value FROM json_each(?))

-- name: best_parked
-- The best runs parked under a key, and their queues.
SELECT json_group_array(added), json_group_array(DISTINCT queue) FROM (
    SELECT added, queue FROM runs WHERE parked = ? ORDER BY priority DESC, created_ms, id LIMIT ?)

-- name: unpark
-- They are claimable again.
UPDATE runs SET parked = NULL WHERE added IN (SELECT value FROM json_each(?))

-- name: all_running_specs
-- The specs of all running runs, for limits.
SELECT '[' || coalesce(group_concat(spec), '') || ']' FROM runs WHERE state = 'running'

-- name: bodies
-- Bodies [[run, key], …] as names with lengths, and one text of hex digits.
SELECT json_group_array(json_array(run, key, size)), group_concat(hex(data), '') FROM (
    SELECT b.run, b.key, length(b.data) AS size, b.data
    FROM json_each(?) AS j CROSS JOIN bodies AS b ON b.run = j.value ->> 0 AND b.key = j.value ->> 1 LIMIT -1)

-- name: all_gates
-- Every gate, in order.
SELECT '[' || coalesce(group_concat(body), '') || ']' FROM (SELECT body FROM gates ORDER BY key, kind LIMIT -1)

-- == leases =========================================================================================================

-- name: extend
-- Prolong the leases [[run, attempt, worker], …] that are not over.
UPDATE runs SET alarm_ms = max(alarm_ms, ?) WHERE added IN (
    SELECT r.added FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.value ->> 0
    WHERE r.state = 'running' AND r.attempt = j.value ->> 1 AND r.worker = j.value ->> 2 AND r.alarm_ms > ?)

-- name: kept
-- Which of the leases [[run, attempt, worker], …] are held and not asked to stop.
SELECT json_group_array(j.key) FROM json_each(?) AS j CROSS JOIN runs AS r ON r.id = j.value ->> 0
WHERE r.state = 'running' AND r.attempt = j.value ->> 1 AND r.worker = j.value ->> 2 AND r.alarm_ms > ?
    AND NOT r.stop_asked

-- == looking ========================================================================================================

-- name: stamp
-- The last EventId there is, and the last that was forgotten.
SELECT coalesce((SELECT max(last_id) FROM journal), 0),
    CAST(coalesce((SELECT value FROM meta WHERE key = 'forgotten'), '0') AS INTEGER)

-- name: runs_by_id
-- Runs by their ids.
SELECT :include(list) FROM (
    SELECT :include(run_item) AS item FROM runs WHERE id IN (SELECT value FROM json_each(?)))

-- name: waiting_children
-- Of each parent the first edges to children that still wait: [parent, [[child, when], …]].
SELECT json_group_array(json_array(p.value, json((
    SELECT json_group_array(json_array(child, "when")) FROM (
        SELECT e.child, e."when" FROM edges AS e CROSS JOIN runs AS r ON r.id = e.child
        WHERE e.parent = p.value AND r.state = 'waiting' ORDER BY e.child LIMIT :most)))))
FROM json_each(:parents) AS p

-- name: records_by_key
-- Records [[kind, key], …] with their bodies as hex digits.
SELECT json_group_array(json_array(r.kind, r.key, r.version, hex(r.body), r.tag, r.alarm_ms, r.added))
FROM json_each(?) AS j CROSS JOIN records AS r ON r.kind = j.value ->> 0 AND r.key = j.value ->> 1

-- name: records_by_kind
-- All records of some kinds, with their bodies as hex digits.
SELECT json_group_array(json_array(kind, key, version, hex(body), tag, alarm_ms, added)) FROM (
    SELECT * FROM records WHERE kind IN (SELECT value FROM json_each(?)) ORDER BY kind, key LIMIT -1)

-- name: counts
-- The counters.
SELECT json_group_array(json_array(queue, state, n)) FROM counters WHERE n > 0

-- name: due_runs
-- Runs whose alarm has rung, earliest first.
SELECT :include(list) FROM (
    SELECT :include(run_item) AS item FROM runs
    WHERE alarm_ms IS NOT NULL AND alarm_ms <= ? ORDER BY alarm_ms, id LIMIT ?)

-- name: due_records
-- Records whose alarm has rung, earliest first.
SELECT json_group_array(json_array(kind, key, version, hex(body), tag, alarm_ms, added)) FROM (
    SELECT * FROM records WHERE alarm_ms IS NOT NULL AND alarm_ms <= ? ORDER BY alarm_ms, kind, key LIMIT ?)

-- name: due_gates
-- Gates whose time is over, earliest first.
SELECT '[' || coalesce(group_concat(body), '') || ']' FROM (
    SELECT body FROM gates WHERE until_ms <= ? ORDER BY until_ms, key, kind LIMIT ?)

-- name: next_alarm
-- The first alarm that has not rung.
SELECT min(at_ms) FROM (
    SELECT min(alarm_ms) AS at_ms FROM runs WHERE alarm_ms IS NOT NULL AND alarm_ms > :now_ms
    UNION ALL SELECT min(alarm_ms) FROM records WHERE alarm_ms IS NOT NULL AND alarm_ms > :now_ms
    UNION ALL SELECT min(until_ms) FROM gates WHERE until_ms > :now_ms)

-- == lists, newest first ============================================================================================

-- name: listed
-- What every list filters by, whichever index it walks.
    AND added < :before
    AND (:since_ms IS NULL OR created_ms >= :since_ms) AND (:until_ms IS NULL OR created_ms < :until_ms)
    AND (:scope IS NULL OR scope = :scope) AND (:name IS NULL OR name = :name)
    AND (:label_key IS NULL OR EXISTS (
        SELECT 1 FROM labels AS l WHERE l.key = :label_key AND l.value = :label_value AND l.run = runs.added))
    ORDER BY added DESC LIMIT :limit

-- name: find_all
-- Any run.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs WHERE true :include(listed))

-- name: find_states
-- Any run, of some states.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs
    WHERE +state IN (SELECT value FROM json_each(:states)) :include(listed))

-- name: find_waiting
-- Waiting runs, by their index.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_waiting
    WHERE state = 'waiting' :include(listed))

-- name: find_ready
-- Ready runs that are not parked; the index is that of claims, so they are sorted.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_ready
    WHERE state = 'ready' AND parked IS NULL :include(listed))

-- name: find_parked
-- Ready runs that are parked.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_parked
    WHERE state = 'ready' AND parked IS NOT NULL :include(listed))

-- name: find_running
-- Running runs, by their index.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_running
    WHERE state = 'running' :include(listed))

-- name: find_succeeded
-- Succeeded runs, by their index.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_succeeded
    WHERE state = 'succeeded' :include(listed))

-- name: find_failed
-- Failed runs, by their index.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_failed
    WHERE state = 'failed' :include(listed))

-- name: find_cancelled
-- Cancelled runs, by their index.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_cancelled
    WHERE state = 'cancelled' :include(listed))

-- name: find_job
-- Runs of one job, or of a scope, of some states if given.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs WHERE added IN (
    SELECT added FROM runs INDEXED BY runs_job
    WHERE scope = :scope AND (:states IS NULL OR state IN (SELECT value FROM json_each(:states)))
    :include(listed)) ORDER BY added DESC LIMIT -1)

-- name: find_job_named
-- Runs of one job, of some states if given.
SELECT :include(list) FROM (SELECT :include(run_item) AS item FROM runs INDEXED BY runs_job
    WHERE scope = :scope AND name = :name
    AND (:states IS NULL OR state IN (SELECT value FROM json_each(:states))) :include(listed))

-- name: find_label
-- Runs with a label, of some states if given.
SELECT :include(list) FROM (SELECT :include(run_item) AS item
    FROM labels AS l CROSS JOIN runs ON runs.added = l.run
    WHERE l.key = :label_key AND l.value = :label_value AND l.run < :before
    AND (:states IS NULL OR state IN (SELECT value FROM json_each(:states)))
    AND (:since_ms IS NULL OR created_ms >= :since_ms) AND (:until_ms IS NULL OR created_ms < :until_ms)
    AND (:scope IS NULL OR scope = :scope) AND (:name IS NULL OR name = :name)
    ORDER BY l.run DESC LIMIT :limit)

-- == journal ========================================================================================================

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

-- == logs ===========================================================================================================

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

-- == lifetime =======================================================================================================

-- name: end_leases
-- At an exclusive start nobody holds a lease: all are due for a look at once.
UPDATE runs SET alarm_ms = 1 WHERE added IN (SELECT added FROM runs WHERE state = 'running')

-- name: hope
-- From here on a call may be undone, without what came before it in the same transaction.
SAVEPOINT hope

-- name: give_up_hope
-- Undo the call.
ROLLBACK TO hope

-- name: end_of_hope
-- What was done since, if it was not undone, belongs to the transaction.
RELEASE hope

-- name: begin_writing
-- One writer, so it never waits for another.
BEGIN IMMEDIATE

-- name: begin_reading
-- One moment for all that is read.
BEGIN

-- name: commit
-- And flush.
COMMIT

-- name: roll_back
-- End of a reading, or of a writing that failed.
ROLLBACK

-- name: checkpoint
-- Copy the WAL into the file and start it afresh.
PRAGMA wal_checkpoint(TRUNCATE)

-- name: vacuum
-- Give some free pages back to the file system: 512 pages are 2 MiB.
PRAGMA incremental_vacuum(512)

-- name: synchronous
-- How this connection flushes: 2 is FULL.
PRAGMA synchronous

-- name: count_tables
-- An empty file has none.
SELECT count(*) FROM sqlite_schema

-- name: new_file
-- What can only be said before the first table: pages that become free can be given back in bounded steps.
PRAGMA auto_vacuum = INCREMENTAL

-- name: known_file
-- A file that has tables keeps what it was made with.
PRAGMA auto_vacuum

-- name: any_connection
-- A backup tool may hold the file for a moment; 64 MiB of pages; freed pages need not be overwritten.
PRAGMA busy_timeout = 5000;
PRAGMA cache_size = -65536;
PRAGMA temp_store = MEMORY;
PRAGMA secure_delete = OFF

-- name: writing_connection
-- Acknowledged is flushed. The WAL is copied back every 4 MiB, and shrinks to 16 MiB after a burst.
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA wal_autocheckpoint = 1000;
PRAGMA journal_size_limit = 16777216

-- name: reading_connection
-- Belt and braces: the file is opened for reading only.
PRAGMA query_only = ON
