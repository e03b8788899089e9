-- Statements of the hot path answer one row, however many runs they tell of: each row that Python fetches hands
-- over the GIL. JSON arrays in text form carry the rest, and msgspec reads them straight into structs.
-- These two are no statements but parts of others.

-- name: run_item
-- One run as a JSON array, in the order of rows.RunItem; the spec is pasted in as it was stored.
'[' || spec || ',' || coalesce(result, 'null')
    || iif(has_children, ',true', ',false') || iif(stop_asked, ',true,', ',false,')
    || substr(json_array(id, version, state, priority, attempt, tries, crashes, due_ms, alarm_ms, live_key, worker,
        started_ms, ended_ms, reason, error, exit_code, waits_for, parked, added, changed), 2)

-- name: list
-- Items as one JSON list.
'[' || coalesce(group_concat(item), '') || ']'
