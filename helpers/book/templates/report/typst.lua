-- What pandoc's Typst writer is told about a notebook: text stays literal, and tables are handed to `data-table` of
-- style.typ.

local function quoted(text)
  return '"' .. text:gsub('[\\"]', '\\%0') .. '"'
end

local function raw(text) return pandoc.RawInline('typst', text) end

-- In Typst's markup `...`, `--`, `1.` and a `=` at the start of a cell mean something; in a string nothing does.
local function literal(str)
  local plain = not str.text:match('[^%w,;:()!?%.\128-\255]')
  if plain and not str.text:find('..', 1, true) and not str.text:match('^%d+%.$') then return nil end
  return raw('#' .. quoted(str.text) .. ';')
end

local function link(element)
  if element.target:match('^%a[%w+.-]*:') then return nil end
  local notebook, section = element.target:match('^([%w_.-]+)%.ipynb#?(.*)$')
  if not notebook then return element.content end -- another relative link leads nowhere from a PDF
  local table_of = element.title:match('^table (%d+)$') -- which table of the section is meant
  local target = quoted(notebook) .. (section == '' and '' or ', section: ' .. quoted(section))
  target = target .. (table_of and ', nth: ' .. table_of or '')
  local parts = pandoc.Inlines {raw('#chapter-link(' .. target .. ')[')}
  parts:extend(element.content)
  parts:insert(raw('];'))
  return parts
end

-- Tags of HTML are printed as they are: without `<sup>`, 10<sup>9</sup> would be another number.
local function tag(inline)
  if inline.format == 'html' then return inline.text:match('^<!') and {} or raw('#' .. quoted(inline.text) .. ';') end
end

local text = {Str = literal, Link = link, RawInline = tag,
              Code = function(code) return raw('#raw(' .. quoted(code.text) .. ');') end}

local function data_table(tbl)
  local caption = #tbl.caption.long > 0 and pandoc.utils.blocks_to_inlines(tbl.caption.long) or nil
  tbl.caption = {long = {}}
  local source = pandoc.write(pandoc.Pandoc {tbl:walk(text)}, 'typst', {wrap_text = 'none'})
  local call = pandoc.RawBlock('typst', '#data-table(' .. source:match('#(table%(.*%))%]') .. ')')
  if not caption then return call end
  caption:insert(1, raw('#captioned(['))
  caption:insert(raw('])['))
  return {pandoc.Plain(caption), call, pandoc.RawBlock('typst', ']')}
end

local function html(block)
  if block.format == 'html' then return pandoc.Plain {pandoc.RawInline('html', block.text)} end
end

return {{Table = data_table, RawBlock = html}, text}
