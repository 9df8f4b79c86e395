-- A pandoc table becomes a call of `data-table` in style.typ. Here is decided what only the text can tell:
-- which columns hold numbers, which hold sentences that may wrap, and where a long column name can be broken.

local MISSING = {[''] = true, ['-'] = true, ['–'] = true, ['—'] = true, ['...'] = true, ['…'] = true,
                 ['nan'] = true, ['none'] = true, ['<na>'] = true, ['n/a'] = true}
local CUT = '\u{E001}' -- stands between two cells while they are written: no notebook writes it
local SENTENCE = 24 -- characters; a longer text with a space in it may wrap

local function is_number(text)
  for _, sign in ipairs {'−', '±', '≈', '≤', '≥', '×', '∞'} do text = text:gsub(sign, '') end
  text = text:gsub('^[%s%+%-~<>=$(]+', '')
  local _, letters = text:gsub('%a', '')
  return text:match('^%d') ~= nil and letters <= 4
end

local function length(text) return utf8.len(text) or #text end

-- Where a name may be broken: after a space, a point or a slash, but for a unit after the slash (tokens/s).
local function pieces_of(name)
  local pieces = {}
  for piece in name:gmatch('[^._%s/]*[._%s/]*') do
    local last = pieces[#pieces]
    if last and last:sub(-1) == '/' and piece:match('^%a%a?%A*$') then pieces[#pieces] = last .. piece
    elseif piece ~= '' then pieces[#pieces + 1] = piece end
  end
  return pieces
end

local function longest_of(words)
  local longest = 0
  for _, word in ipairs(words) do longest = math.max(longest, length(word:gsub('%s+$', ''))) end
  return longest
end

-- `tokens_per_s` over numbers of five digits is written on two lines when space is short.
local function narrowed(name, width)
  local lines, pieces = {}, pieces_of(name)
  for _, piece in ipairs(pieces) do width = math.max(width, length(piece)) end
  for _, piece in ipairs(pieces) do
    local last = lines[#lines]
    if last and length(last .. piece) <= width then lines[#lines] = last .. piece else lines[#lines + 1] = piece end
  end
  return lines
end

-- A name on one line if its column is that wide, else on two lines of about the same length.
local function halved(name, width)
  local pieces, best = pieces_of(name), {name}
  if length(name) <= width then return best end
  local shortest = length(name)
  for cut = 1, #pieces - 1 do
    local first, second = table.concat(pieces, '', 1, cut), table.concat(pieces, '', cut + 1)
    local longer = math.max(length(first), length(second))
    if longer < shortest then best, shortest = {first, second}, longer end
  end
  return best
end

-- Calls visit(cell, row, column); a cell of several rows or columns shifts those after it.
local function each_cell(rows, visit)
  local taken = {}
  for y, row in ipairs(rows) do
    local x = 1
    for _, cell in ipairs(row.cells) do
      while (taken[x] or 0) >= y do x = x + 1 end
      visit(cell, y, x)
      for i = x, x + cell.col_span - 1 do taken[i] = y + cell.row_span - 1 end
      x = x + cell.col_span
    end
  end
end

local function rows_of(tbl)
  local head, body, row_heads = pandoc.List(tbl.head.rows), pandoc.List {}, 0
  for _, part in ipairs(tbl.bodies) do
    body:extend(part.head)
    body:extend(part.body)
    row_heads = math.max(row_heads, part.row_head_columns)
  end
  body:extend(tbl.foot.rows)
  return head, body, row_heads
end

local function columns_of(tbl, head, body, row_heads)
  local columns = {}
  for x, spec in ipairs(tbl.colspecs) do
    columns[x] = {longest = 0, numbers = 0, words = 0, word = 0, spaced = false, align = spec[1]}
  end
  each_cell(head, function(cell, _, x)
    local column = columns[x]
    if column then column.word = math.max(column.word, longest_of(pieces_of(pandoc.utils.stringify(cell.contents)))) end
  end)
  each_cell(body, function(cell, _, x)
    local said, column = pandoc.utils.stringify(cell.contents), columns[x]
    if not column or cell.col_span > 1 then return end
    column.longest = math.max(column.longest, length(said))
    column.spaced = column.spaced or said:find('%s') ~= nil
    for word in said:gmatch('%S+') do column.word = math.max(column.word, length(word)) end
    if is_number(said) then column.numbers = column.numbers + 1
    elseif not MISSING[said:lower()] then column.words = column.words + 1 end
  end)
  for x, column in ipairs(columns) do
    local numeric = x > row_heads and column.numbers > 0 and column.numbers >= column.words
    local written = {AlignLeft = 'left', AlignRight = 'right', AlignCenter = 'center'}
    column.align = written[column.align] or (numeric and 'right' or 'left')
    column.wraps = column.spaced and not numeric and column.longest > SENTENCE
    column.text = column.spaced and not numeric
  end
  return columns
end

return function(text_filter)
  -- Of each list of blocks its Typst. The writer takes a millisecond to start, so it runs once for all.
  local function typst(contents)
    local together, texts = pandoc.Blocks {}, {}
    for _, content in ipairs(contents) do
      together:extend(content)
      together:insert(pandoc.RawBlock('typst', CUT))
    end
    local whole = pandoc.write(pandoc.Pandoc(together):walk(text_filter), 'typst', {wrap_text = 'none'})
    for text in whole:gmatch('(.-)' .. CUT) do texts[#texts + 1] = text:gsub('^%s+', ''):gsub('%s+$', '') end
    return texts
  end

  local function written(rows, content)
    local calls, contents = {}, {}
    each_cell(rows, function(cell, _, x)
      local call = ''
      if cell.col_span > 1 or cell.row_span > 1 then
        local align = cell.col_span > 1 and ', align: center' or ''
        call = string.format('table.cell(colspan: %d, rowspan: %d%s)', cell.col_span, cell.row_span, align)
      end
      calls[#calls + 1], contents[#contents + 1] = call, content(cell, x)
    end)
    local cells = {}
    for i, text in ipairs(typst(contents)) do cells[i] = calls[i] .. '[' .. text .. ']' end
    return '(' .. table.concat(cells, ', ') .. (#cells > 0 and ',)' or ')')
  end

  local function Table(tbl)
    local head, body, row_heads = rows_of(tbl)
    local columns = columns_of(tbl, head, body, row_heads)
    local aligns, weights, words = {}, {}, {}
    for x, column in ipairs(columns) do
      aligns[x] = column.align
      weights[x] = column.wraps and tostring(math.min(column.longest, 90)) or '0'
      words[x] = column.text and tostring(column.word) or '0'
    end
    local function plain(cell) return cell.contents end
    local function in_lines(lines_of)
      return function(cell, x)
        if cell.col_span > 1 or not columns[x] then return plain(cell) end
        local width = columns[x].wraps and SENTENCE or columns[x].longest
        local lines = lines_of(pandoc.utils.stringify(cell.contents), width)
        if #lines < 2 then return plain(cell) end
        local parts = pandoc.Inlines {}
        for i, line in ipairs(lines) do
          if i > 1 then parts:insert(pandoc.RawInline('typst', '#linebreak();')) end
          parts:insert(pandoc.Str(line))
        end
        return {pandoc.Plain(parts)}
      end
    end
    local function loose(cell, x)
      local parts = pandoc.Inlines {}
      for _, piece in ipairs(pieces_of(pandoc.utils.stringify(cell.contents))) do
        parts:extend {pandoc.Str(piece), pandoc.RawInline('typst', '#sym.zws;')}
      end
      return {pandoc.Plain(parts)}
    end
    local call = string.format('#data-table(align: (%s,), weights: (%s,), words: (%s,), header-rows: %d,\n '
      .. 'header: %s,\n halved: %s,\n narrow: %s,\n loose: %s,\n rows: %s)', table.concat(aligns, ', '),
      table.concat(weights, ', '), table.concat(words, ', '), #head, written(head, plain),
      written(head, in_lines(halved)), written(head, in_lines(narrowed)), written(head, loose), written(body, plain))
    if #tbl.caption.long > 0 then
      call = '#captioned([' .. typst({tbl.caption.long})[1] .. '])[' .. call .. ']'
    end
    return pandoc.RawBlock('typst', call)
  end

  return {Table = Table}
end
