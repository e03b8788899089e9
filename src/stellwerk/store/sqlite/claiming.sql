-- What claims look at, parking, and leases.

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
-- The best runs parked under a key, their queues and their ids.
SELECT json_group_array(added), json_group_array(DISTINCT queue), json_group_array(id) FROM (
    SELECT added, queue, id FROM runs WHERE parked = ? ORDER BY priority DESC, created_ms, id LIMIT ?)

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
