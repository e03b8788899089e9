-- Looks: what a decision needs, alarms, and lists, newest first.

-- name: stamp
-- The last EventId there is, and the last that was forgotten.
SELECT coalesce((SELECT max(last_id) FROM journal), 0),
    CAST(coalesce((SELECT value FROM meta WHERE key = 'forgotten'), '0') AS INTEGER)

-- name: runs_by_id
-- Runs by their ids.
SELECT :include(list) FROM (
    SELECT :include(run_item) AS item FROM runs WHERE id IN (SELECT value FROM json_each(?)))

-- name: live_below
-- Those of the named parents that have a child which has not ended.
SELECT json_group_array(p.value) FROM json_each(?) AS p
WHERE EXISTS (
    SELECT 1 FROM edges AS e JOIN runs AS r ON r.id = e.child
    WHERE e.parent = p.value AND r.state IN ('waiting', 'ready', 'running'))

-- name: waiting_children
-- Of each parent the first edges to children that still wait: [parent, [[child, when], …]].
SELECT json_group_array(json_array(p.value, json((
    SELECT json_group_array(json_array(child, "when")) FROM (
        SELECT e.child, e."when" FROM edges AS e CROSS JOIN runs AS r ON r.id = e.child
        WHERE e.parent = p.value AND e.child > :after AND r.state = 'waiting' ORDER BY e.child LIMIT :most)))))
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
